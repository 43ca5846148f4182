#!/usr/bin/env bash
# Installs the Helm chart on a real cluster: training begins by itself, every pod is deleted once, two
# generators, uninstalled with a checkpoint, continued. About ten minutes. The last line is the verdict.
#
#   bash tests/deploy/kubernetes.sh                       a cluster of one node, made here
#   KUBECONFIG=... IMAGE=registry/asyncrl:tag STORAGE=class bash tests/deploy/kubernetes.sh    yours
#
# Both: kubectl, and Python with asyncrl's extra `dev` as PYTHON (.venv/bin/python).
# A cluster made here: root on Debian 12 (amd64), what get.sh names, and the image as an archive in
# IMAGE_ARCHIVE (`docker save asyncrl:test`, named asyncrl:test). DEPLOY_DIR (/var/tmp/asyncrl-kubernetes)
# keeps what was fetched and built.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
drive=("$python" "$here/kubernetes/drive.py")
export PYTHONPATH=$root
cannot() { echo "NOT RUN: $1"; exit 3; }
[ -x "$python" ] || cannot "$python is missing: make setup, or set PYTHON"
command -v kubectl > /dev/null || cannot "kubectl is missing (Debian: kubernetes-client)"

if [ -n "${KUBECONFIG:-}" ]; then
  exec "${drive[@]}" "${IMAGE:?the image, as the nodes of your cluster pull it}" --storage "${STORAGE:-}"
fi

[ "$(id -u)" = 0 ] || cannot "a cluster made here needs root; KUBECONFIG and IMAGE name another one"
dir=${DEPLOY_DIR:-/var/tmp/asyncrl-kubernetes}
[ -e "$dir/x/ready" ] || bash "$here/kubernetes/get.sh" "$dir" > /dev/null
[ -e "$dir/images/pause.tar" ] || "$python" "$here/kubernetes/image.py" pause "$dir/images/pause.tar"
[ -z "${IMAGE_ARCHIVE:-}" ] || ln -sf "$(realpath "$IMAGE_ARCHIVE")" "$dir/images/asyncrl.tar"
[ -e "$dir/images/asyncrl.tar" ] || cannot "IMAGE_ARCHIVE: docker save asyncrl:test > FILE"

rm -f "$dir/node/ready"
unshare --net --mount --kill-child bash "$here/kubernetes/node.sh" "$dir" > "$dir/node.log" 2>&1 &
node=$!
trap 'kill $node 2> /dev/null; wait $node 2> /dev/null || true' EXIT
for _ in $(seq 600); do
  [ -e "$dir/node/ready" ] && break
  kill -0 $node 2> /dev/null || { tail -n 20 "$dir/node.log"; echo "FAIL: the node ended"; exit 1; }
  sleep 1
done
inside=(nsenter -t "$node" -n -m env "KUBECONFIG=$dir/node/kubeconfig" "PATH=$PATH" "PYTHONPATH=$root")
mkdir -p "$dir/node/volume"; chown 10001:10001 "$dir/node/volume"
"${inside[@]}" kubectl apply -f - << Y
apiVersion: v1
kind: PersistentVolume
metadata: {name: runs}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: test
  hostPath: {path: "$dir/node/volume"}
Y
"${inside[@]}" timeout 3600 "${drive[@]}" docker.io/library/asyncrl:test --storage test
