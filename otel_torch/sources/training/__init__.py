"""What a training step does besides its forwards: losses, rates, norms, health."""
