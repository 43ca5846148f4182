"""Programs that nobody has read, run so that they can hurt nothing on this machine (Linux).

limits      how much a program may use
run         start it, watch it, say how it ended
enter       the script between this process and the program: namespaces, mounts, limits, filter
seccomp     which system calls it may make
check       whether this machine can contain a program at all

What contains it is the kernel's: namespaces for processes, mounts, network and messages; a root
folder of its own with read-only system folders and a small /tmp in memory, without /proc; an
unprivileged user without capabilities; a filter of system calls; resource limits. Where the kernel
refuses one of them, nothing is run. docs/rewards.md says what each tries to prevent.
"""
