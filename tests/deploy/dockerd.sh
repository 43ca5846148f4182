#!/usr/bin/env bash
# Runs a command beside a Docker daemon of its own, on a machine that has none:
#
#   tests/deploy/dockerd.sh COMMAND...        # tests/deploy/compose.sh does this by itself
#
# Needs Linux (overlayfs, bridges, iptables' NAT), root, Debian's package mirrors, 6 GB of disk, and
# mmdebstrap, which it installs on Debian. The daemon and COMMAND run in a Debian 13 in a folder, in
# namespaces of their own: no interface, address, mount or process of the machine is used or changed,
# nothing can be reached from there, and everything ends with COMMAND, however that ends.
# Images stay in the folder for the next call:
#   DEPLOY_DIR   default /var/tmp/asyncrl-deploy; remove it when you are done
# In COMMAND, DEPLOY_DIR, the repository and the folders of DEPLOY_BIND (with : between) have the
# paths that they have outside.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 2; }
say() { printf '%s %s\n' "$(date +%T)" "$*"; }
export DEPLOY_DIR=${DEPLOY_DIR:-/var/tmp/asyncrl-deploy}
repo=$(cd "$(dirname "$0")/../.." && pwd)
[ "$(id -u)" = 0 ] || { echo "$0: root is needed to start a Docker daemon; or start one yourself" >&2; exit 2; }

prepare() {
  if ! command -v mmdebstrap >/dev/null; then
    say "installing mmdebstrap"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends \
      mmdebstrap; } >"$DEPLOY_DIR/apt.log" 2>&1 || { tail "$DEPLOY_DIR/apt.log" >&2; exit 2; }
  fi
  if [ ! -e "$DEPLOY_DIR/root.ready" ]; then
    say "making a Debian 13 with Docker in $DEPLOY_DIR/root"
    rm -rf "$DEPLOY_DIR/root"
    bootstrap --include=docker.io,docker-cli,docker-compose,docker-buildx,iptables,iproute2,tini,curl,jq,ca-certificates \
      trixie "$DEPLOY_DIR/root"
    touch "$DEPLOY_DIR/root.ready"
  fi
}

bootstrap() {  # what mmdebstrap has to say is shown if it fails
  timeout 900 mmdebstrap --variant=minbase --mode=root "$@" >"$DEPLOY_DIR/mmdebstrap.log" 2>&1 \
    || { tail -20 "$DEPLOY_DIR/mmdebstrap.log" >&2; exit 2; }
}

inside() {  # process 1 of the namespaces: when it ends, the kernel ends all others
  local root=$DEPLOY_DIR/root folder
  mount --make-rprivate /
  mount --bind "$root" "$root"
  mount -t tmpfs tmpfs "$root/run"
  mount -t tmpfs tmpfs "$root/tmp"
  for folder in /proc /sys /dev "$DEPLOY_DIR" "$repo" ${DEPLOY_BIND//:/ }; do
    mkdir -p "$root$folder"
    # Seen from inside, the folder does not hold itself.
    if [ "$folder" = "$DEPLOY_DIR" ]; then mount --bind "$folder" "$root$folder"; else mount --rbind "$folder" "$root$folder"; fi
  done
  ip link set lo up
  # On cgroups v1 all containers together would weigh as much as one other process of the machine.
  if [ -e /sys/fs/cgroup/cpu/cpu.shares ]; then
    mkdir -p "/sys/fs/cgroup/cpu$CGROUP"
    echo 8192 >"/sys/fs/cgroup/cpu$CGROUP/cpu.shares"
  fi
  # With chroot, `docker exec` would see the machine's files: it enters the root of the mount namespace.
  mkdir -p "$root/.outside"
  cd "$root"
  pivot_root . .outside
  cd /
  umount --lazy /.outside
  export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
  mkdir -p /etc/docker
  cat >/etc/docker/daemon.json <<JSON
{"data-root": "$DEPLOY_DIR/data", "storage-driver": "overlay2", "cgroup-parent": "$CGROUP",
 "bip": "10.199.0.1/24", "default-address-pools": [{"base": "10.200.0.0/16", "size": 24}], "ip6tables": false,
 "init-path": "/usr/bin/tini-static"}
JSON
  dockerd >"$DEPLOY_DIR/dockerd.log" 2>&1 &
  for _ in $(seq 300); do
    if docker info >/dev/null 2>&1; then break; fi
    kill -0 $! 2>/dev/null || break
    sleep 0.2
  done
  docker info --format 'Docker {{.ServerVersion}}, {{.Driver}}, cgroups v{{.CgroupVersion}}' \
    || { echo "the daemon did not start; $DEPLOY_DIR/dockerd.log ends with:" >&2; tail -5 "$DEPLOY_DIR/dockerd.log" >&2; exit 2; }
  cd "$repo"
  env -i PATH="$PATH" TERM="${TERM:-dumb}" LANG=C.UTF-8 HOME=/root ASYNCRL_OWN_DAEMON=1 DEPLOY_DIR="$DEPLOY_DIR" \
    STEPS="${STEPS:-}" KEEP="${KEEP:-}" SAVE="${SAVE:-}" "$@"
}

if [ "${1:-}" = --inside ]; then shift; inside "$@"; exit; fi
mkdir -p "$DEPLOY_DIR" "$DEPLOY_DIR/data"
exec 9>"$DEPLOY_DIR/lock"
flock --nonblock 9 || { echo "$0: another daemon uses $DEPLOY_DIR; wait for it, or set DEPLOY_DIR" >&2; exit 2; }
prepare
export CGROUP=/asyncrl-deploy-$$ DEPLOY_BIND=${DEPLOY_BIND:-}
status=0
# The command's standard input is not closed, so that a terminal works.
unshare --net --mount --pid --fork --kill-child --mount-proc "$BASH" "$0" --inside "$@" 9>&- || status=$?
for _ in $(seq 50); do  # the kernel may still be ending processes
  [ -n "$(find /sys/fs/cgroup -depth -type d -path "/sys/fs/cgroup*$CGROUP*")" ] || break
  find /sys/fs/cgroup -depth -type d -path "/sys/fs/cgroup*$CGROUP*" -exec rmdir {} + 2>/dev/null || true
  sleep 0.1
done
exit "$status"
