#!/bin/sh
# First process of a guest. The host's root is mounted read-only; the folder named on the kernel's
# command line is shared for writing at /mnt/share and holds the job.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmpfs /mnt
mount -t tmpfs tmpfs /run
mkdir -p /mnt/share /mnt/disk /mnt/tmp /mnt/home /mnt/root/lib/modules
export TMPDIR=/mnt/tmp HOME=/mnt/home
ln -s "/usr/lib/uml/modules/$(uname -r)" /mnt/root/lib/modules/
share=$(sed 's/.*lab_share=\([^ ]*\).*/\1/' /proc/cmdline)
mount -t hostfs none /mnt/share -o "$share"
ip link set lo up
sh -e /mnt/share/job.sh 2>&1
echo "@lab {\"exit\": $?}"
cd /
umount -a -t ext4,xfs,btrfs 2>/dev/null
sync
echo o > /proc/sysrq-trigger
sleep 600
