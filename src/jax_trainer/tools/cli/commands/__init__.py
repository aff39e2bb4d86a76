"""The commands, one file each or for a few that belong together: its arguments, its help, and the function that runs.

Every file here is found by itself, and is imported before JAX: what needs JAX is imported by the functions.
"""
