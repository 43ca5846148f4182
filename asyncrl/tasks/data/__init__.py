"""User datasets: read, mapped by the user's function, and turned into questions."""
