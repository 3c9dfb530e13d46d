"""Plain models of transformers and diffusers; the port has another attention kernel, and a fault."""
