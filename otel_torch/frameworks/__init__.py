"""Support for single frameworks, one file each.

A file's `HOOKS` maps module names to functions that are called after the module is imported; its
`uninstall` reverts what they have changed.
"""
