"""Communication without tensors: what can be combined, how many bytes it sends, and how long that takes."""
