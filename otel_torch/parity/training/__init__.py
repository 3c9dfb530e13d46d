"""Compares what a training step does besides its forwards: loss, gradients, updated parameters."""
