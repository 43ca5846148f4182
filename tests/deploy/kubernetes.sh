#!/usr/bin/env bash
# Installs the Helm chart on a real cluster: training begins by itself, every pod is deleted once, two
# generators, uninstalled with a checkpoint, continued. About ten minutes. The last line is the verdict:
# PASS, FAIL or NOT RUN, with the reason.
#
#   bash tests/deploy/kubernetes.sh                       a cluster of one node, made here
#   KUBECONFIG=... IMAGE=registry/asyncrl:tag STORAGE=class bash tests/deploy/kubernetes.sh    yours
#
# Both: Python with asyncrl's extra `dev` as PYTHON (.venv/bin/python). Yours: kubectl. A cluster made
# here: root on Debian 12 (amd64), 12 GB of disk, and the image as an archive in IMAGE_ARCHIVE
# (`docker save asyncrl:test`, with that name). DEPLOY_DIR (/var/tmp/asyncrl-kubernetes) keeps what was
# fetched and built, and the logs of the node; the rest of the node is removed (KEEP=1 keeps it).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
drive=("$python" "$here/kubernetes/drive.py")
export PYTHONPATH=$root PYTHON=$python
cannot() { echo "NOT RUN: $1"; exit 3; }
say() { printf '%s %s\n' "$(date +%T)" "$*"; }
[ -x "$python" ] || cannot "$python is missing: make setup, or set PYTHON"
"$python" -c 'import helm_python' 2> /dev/null || cannot "$python lacks helm-python-sdk: pip install -e '.[dev]'"

if [ -n "${KUBECONFIG:-}" ]; then
  command -v kubectl > /dev/null || cannot "kubectl is missing (Debian: kubernetes-client)"
  exec "${drive[@]}" "${IMAGE:?the image, as the nodes of your cluster pull it}" --storage "${STORAGE:-}"
fi

[ "$(id -u)" = 0 ] || cannot "a cluster made here needs root; KUBECONFIG and IMAGE name another one"
dir=${DEPLOY_DIR:-/var/tmp/asyncrl-kubernetes}
mkdir -p "$dir/images"
dir=$(cd "$dir" && pwd)
archive=${IMAGE_ARCHIVE:-$dir/images/asyncrl.tar}
[ -e "$archive" ] || cannot "IMAGE_ARCHIVE: docker save asyncrl:test > FILE"
exec 9> "$dir/lock"
flock --nonblock 9 || cannot "another cluster uses $dir; wait for it, or set DEPLOY_DIR"
[ -e "$dir/x/ready" ] || bash "$here/kubernetes/get.sh" "$dir" || { echo "FAIL: get.sh"; exit 1; }
[ -e "$dir/images/pause.tar" ] || "$python" "$here/kubernetes/image.py" pause "$dir/images/pause.tar"
[ -z "${IMAGE_ARCHIVE:-}" ] || ln -sf "$(realpath "$archive")" "$dir/images/asyncrl.tar"

say "starting a cluster of one node; its logs are in $dir/node"
rm -rf "$dir/node"
mkdir "$dir/node"
status=0
unshare --net --mount --pid --fork --kill-child --mount-proc bash "$here/kubernetes/node.sh" "$dir" \
  timeout 3600 "${drive[@]}" docker.io/library/asyncrl:test --storage test 9>&- || status=$?
# The kernel may still be ending processes.
for _ in $(seq 50); do
  [ -n "$(find /sys/fs/cgroup -depth -type d -path '/sys/fs/cgroup*/k8s.io*')" ] || break
  find /sys/fs/cgroup -depth -type d -path '/sys/fs/cgroup*/k8s.io*' -exec rmdir {} + 2> /dev/null || true
  sleep 0.1
done
[ "${KEEP:-}" ] || rm -rf "$dir"/node/{containerd,etcd,kubelet,volume,run}
[ "$status" != 124 ] || echo "FAIL: not at its end after an hour"
exit "$status"
