"""Worker processes for functions of users: started, watched, limited and ended."""
