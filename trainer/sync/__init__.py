"""Local SGD: workers apply their own gradients, and average their parameters now and then."""
