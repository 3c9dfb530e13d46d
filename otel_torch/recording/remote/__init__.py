"""Recordings that a URL names: copied here before they are read, uploaded once they are whole."""
