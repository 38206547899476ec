"""Trials of the store on real kernels and file systems: ``make lab`` (root, Debian packages).

`__main__`       chooses, runs and reports; isolates everything so that nothing is left behind
`needs`          what must be installed
`host`           images, mounts, commands of this machine
`guest`          a user-mode Linux kernel that can be killed
`workload`       a training without torch whose every step can be checked bit for bit
`writing`        the program that saves inside a guest
`kernel_crash`   the kernel is killed under a writer, on ext4, xfs and btrfs
`block_replay`   what the disk holds after any prefix of its writes, and after lost ones
`nfs`, `nfs_guest`  one NFSv4 server, two clients
`full_disk`      a real training on a file system that is too small
`device_errors`  a real training on a disk whose reads, writes or flushes fail
"""
