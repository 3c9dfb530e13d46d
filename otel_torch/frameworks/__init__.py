"""What is special about a framework, one file each. A file says in `HOOKS` what to do right after a
module was imported, and takes all of it back in `uninstall`.
"""
