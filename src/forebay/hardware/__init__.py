"""What this machine lets the process use: cores, memory limits, signs of swapping.

No torch here, and nothing is changed: these modules read the operating system's files. Their
roots (`/sys`, `/proc`) are parameters, so that a test describes any machine by a folder of files.
"""
