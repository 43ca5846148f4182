"""Runs untrusted programs so that they cannot harm this machine (Linux).

limits      how much a program may use
run         start it, watch it, report its end
enter       the script between this process and the program: namespaces, mounts, limits, filter
seccomp     the filter of system calls
check       tests whether this machine can contain a program

The kernel contains the program: namespaces for processes, mounts, network and messages; a separate
root folder with read-only system folders and a small /tmp in memory, without /proc; an unprivileged
user without capabilities; a filter of system calls; resource limits. If the kernel refuses one of
them, nothing is run. docs/sandbox.md says what each prevents.
"""
