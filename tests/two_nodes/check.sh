#!/usr/bin/env bash
# Serves on a kernel with two NUMA nodes: a virtual machine of two cores, emulated by qemu (about 5
# minutes on 2 cores). Its root is this machine's, read-only, so that nothing is installed in it;
# serve_on_nodes.py is what it runs. Debian 12 or newer with qemu-system-x86, busybox-static and
# cpio; the kernel is downloaded. Variables:
#
#   PYTHON  interpreter with this project's packages (default: .venv/bin/python)
#   PLACE   folder of the kernel, which a second run reuses (default: /var/tmp/crossover-two-nodes)
#   LIMIT   maximum seconds of the virtual machine (default: 1200)
set -euo pipefail
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(realpath -s "${PYTHON:-$source/.venv/bin/python}")
place=${PLACE:-/var/tmp/crossover-two-nodes}
not_run() { echo "two nodes: not run: $*"; exit 0; }

[[ $(uname -m) == x86_64 ]] || not_run "this machine is not x86-64"
for tool in qemu-system-x86_64 busybox cpio; do
  command -v "$tool" >/dev/null || not_run "$tool is missing"
done
mkdir -p "$place" && cd "$place"
if ! compgen -G 'kernel/boot/vmlinuz-*' >/dev/null; then
  # linux-image-amd64 has no files of its own and depends on the package that has them.
  package=$(apt-cache depends linux-image-amd64 | grep -o -m 1 'linux-image-[0-9].*') ||
    not_run "apt-get does not know linux-image-amd64"
  apt-get download -qq "$package" 2>/dev/null || not_run "$package cannot be downloaded"
  dpkg -x "$package"_*.deb kernel
fi
modules=(virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci netfs fscache
  9pnet 9pnet_virtio 9p)
rm -rf first && mkdir -p first/{bin,root,proc,sys,dev}
cp "$(command -v busybox)" first/bin/busybox
for module in "${modules[@]}"; do find kernel -name "$module.ko*" -exec cp {} first/ \; ; done
cat >first/init <<END
#!/bin/busybox sh
/bin/busybox --install -s /bin
for module in ${modules[*]}; do insmod /\$module.ko*; done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro root /root
mount -t proc none /root/proc && mount -t sysfs none /root/sys && mount -t devtmpfs none /root/dev
mount -t tmpfs none /root/run
ip link set lo up
export HOME=/run TMPDIR=/run PYTHONPATH=$source PYTHONDONTWRITEBYTECODE=1 PATH=/usr/bin:/bin
export CROSSOVER_BACKENDS=fake=tests.fake_backend:FakeBackend
chroot /root $python $source/tests/two_nodes/serve_on_nodes.py && echo "two nodes: passed"
poweroff -f
END
chmod +x first/init
(cd first && find . | cpio --quiet -o -H newc | gzip -1) >first.gz
timeout "${LIMIT:-1200}" nice qemu-system-x86_64 -accel tcg,thread=multi -cpu max -machine q35 \
  -smp 2,sockets=2 -m 4G \
  -object memory-backend-ram,size=2G,id=m0 -numa node,nodeid=0,cpus=0,memdev=m0 \
  -object memory-backend-ram,size=2G,id=m1 -numa node,nodeid=1,cpus=1,memdev=m1 \
  -kernel kernel/boot/vmlinuz-* -initrd first.gz -append "console=ttyS0 quiet panic=-1" \
  -virtfs local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap \
  -nic none -display none -monitor none -serial stdio -no-reboot </dev/null | tee log
grep -q '^two nodes: passed' log
