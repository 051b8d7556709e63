"""How drafts are made: one interface, and the drafters that implement it."""
