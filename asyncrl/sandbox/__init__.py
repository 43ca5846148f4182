"""Runs untrusted programs so that they cannot harm this machine (Linux).

limits      how much a program may use
run         start it, watch it, report its end
enter       the script between this process and the program: namespaces, mounts, limits, filter
seccomp     the filter of system calls
check       tests whether this machine can contain a program

What contains it is the kernel's: namespaces for processes, mounts, network and messages; a root
folder of its own with read-only system folders and a small /tmp in memory, without /proc; an
unprivileged user without capabilities; a filter of system calls; resource limits. Where the kernel
refuses one of them, nothing is run. docs/rewards.md says what each tries to prevent.
"""
