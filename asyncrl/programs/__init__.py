"""Programs written by a model, and the tests that judge them.

tests     the tests of a problem, read and checked; comparison of values
asking    runs calls of a program in the sandbox, and returns the results
calls     the script that makes them there

Expected values never enter the sandbox, except in tests that stay an `assert`.
"""
