"""The decoder that both services share: token ids in, logits out. Knows no network."""
