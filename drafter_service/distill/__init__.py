"""Distillation: trains a small drafter for a target on what the target itself writes.

command.py is `paceline distill`. prompts.py asks, teacher.py lets the target answer and notes its
probabilities, corpus.py keeps both on disk, student.py is the decoder in training, training.py
trains it, export.py writes what the loader reads, acceptance.py measures that.
"""
