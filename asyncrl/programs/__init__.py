"""Programs of a model and the tests that say whether they are right.

tests     the tests of a problem, read and checked; when a value is right
asking    calls of a program made in the sandbox, and what came of each
calls     the script that makes them there

What is right never enters the sandbox, but in tests of the form `assert` that stay one.
"""
