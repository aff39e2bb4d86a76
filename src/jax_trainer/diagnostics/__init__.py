"""What explains: unknown names and what was meant, the user's line in an error, checks of what a trace shows, time.

Its files are imported one by one, some of them before JAX.
"""
