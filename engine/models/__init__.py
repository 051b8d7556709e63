"""Models as the decoders run them: what a family needs, its weights, and how a step is computed."""
