"""What explains: unknown names and what was meant, the user's line in an error, checks of what a trace shows, time.

And what every package needs: output, crash-safe files and files of lines, threads with a queue.

Its files are imported one by one, some of them before JAX.
"""
