"""The process that a run happens in: its place in the job, forks, exit, imports, and messages."""
