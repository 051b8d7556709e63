"""What a client lets the model call, how a model writes calls, and how those are read back."""
