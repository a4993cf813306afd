"""What both halves stand on: errors, files, records, events, and the laws that planning and training share."""
