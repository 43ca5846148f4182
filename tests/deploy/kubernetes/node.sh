#!/usr/bin/env bash
# Runs a command beside a Kubernetes cluster of one node. tests/deploy/kubernetes.sh calls it:
#
#   unshare --net --mount --pid --fork --kill-child --mount-proc bash node.sh DIRECTORY COMMAND...
#
# It is process 1 of namespaces of their own, so that nothing of the cluster is left when it ends,
# however it ends. Needs root. DIRECTORY/x holds what get.sh has put there, DIRECTORY/images the images
# that the node has. DIRECTORY/node is where the node keeps everything, its logs too. COMMAND finds the
# cluster by KUBECONFIG, a volume of 1 GB of class `test`, and kubectl. To look into a cluster that runs:
#
#   nsenter --target "$(pgrep -f '^bash .*/node.sh')" --all env KUBECONFIG=DIRECTORY/node/kubeconfig \
#     DIRECTORY/x/usr/bin/kubectl get pods -A
set -euo pipefail
[ $$ = 1 ] || { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
X=$1/x W=$1/node images=$1/images
shift
mkdir -p "$W"/{certs,cni,kubelet,containerd,run,volume}
export PATH=$X/k8s:$X/usr/bin:$X/usr/sbin:$PATH KUBECONFIG=$W/kubeconfig
mount --make-rprivate /
mount -t tmpfs none /run                      # containerd and kubelet want sockets and locks there
mkdir -p /run/containerd
ip link set lo up
ip link add d0 type veth peer name d1         # the node's address, which outlives every pod
ip link set d1 up; ip addr add 10.250.0.1/24 dev d0; ip link set d0 up; ip route add default dev d0
echo 1 > /proc/sys/net/ipv4/ip_forward

# On cgroups v1 all pods together would weigh as much as one other process of the machine.
if [ -e /sys/fs/cgroup/cpu/cpu.shares ]; then
  mkdir -p /sys/fs/cgroup/cpu/k8s.io
  echo 8192 > /sys/fs/cgroup/cpu/k8s.io/cpu.shares
fi

openssl genrsa -out "$W/sa.key" 2048 2> "$W/openssl.log"
token=$(head -c 24 /dev/urandom | base64 | tr -d '+/=')
(umask 077; echo "$token,admin,admin,system:masters" > "$W/tokens.csv")
(umask 077; cat > "$W/kubeconfig" <<Y
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://10.250.0.1:6443", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: "$token"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
Y
)
cat > "$W/kubelet.yaml" <<Y
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 10.250.0.1
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failSwapOn: false
clusterDNS: [10.250.0.1]
clusterDomain: cluster.local
resolvConf: ""
evictionHard: {"nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "100Mi"}
imageGCHighThresholdPercent: 100
makeIPTablesUtilChains: false
Y
cat > "$W/cni/10-bridge.conflist" <<Y
{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods0", "isGateway": true,
  "ipMasq": false, "ipam": {"type": "host-local", "dataDir": "$W/ipam", "routes": [{"dst": "0.0.0.0/0"}], "ranges": [[{"subnet": "10.251.0.0/24"}]]}}]}
Y
cat > "$W/containerd.toml" <<Y
version = 2
root = "$W/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/c.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "docker.io/library/pause:test"
restrict_oom_score_adj = true                 # not every sandbox lets root lower it
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "$X/usr/lib/cni"
conf_dir = "$W/cni"
Y

pids=()
start() { local log=$1; shift; "$@" > "$W/$log.log" 2>&1 & pids+=($!); }
fail() {  # WHAT PROGRAM: with the end of the program's log
  echo "FAIL: $1; $W/$2.log ends with:"
  tail -n 20 "$W/$2.log" || true
  exit 1
}
command=
finish() {  # the kernel ends what is left
  kill $command "${pids[@]}" 2> /dev/null || true
  [ -z "$command" ] || wait "$command" 2> /dev/null || true
}
trap finish EXIT
trap 'exit 130' TERM INT

start etcd etcd --data-dir "$W/etcd" --listen-client-urls http://127.0.0.1:2379 \
  --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380
start containerd containerd -c "$W/containerd.toml"
start apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 --cert-dir="$W/certs" --secure-port=6443 \
  --advertise-address=10.250.0.1 --service-account-issuer=https://kubernetes.default.svc \
  --service-account-key-file="$W/sa.key" --service-account-signing-key-file="$W/sa.key" \
  --token-auth-file="$W/tokens.csv" --authorization-mode=RBAC --service-cluster-ip-range=10.96.0.0/16 \
  --kubelet-preferred-address-types=InternalIP
server=$!
for _ in $(seq 600); do
  [ "$(kubectl get --raw /readyz 2> /dev/null)" = ok ] && up=yes && break
  kill -0 $server 2> /dev/null || fail "the API server ended" apiserver
  sleep .5
done
[ "${up:-}" ] || fail "the API server is not ready after 300 s" apiserver
start controller-manager kube-controller-manager --kubeconfig="$W/kubeconfig" --leader-elect=false \
  --cert-dir="$W/certs" --service-account-private-key-file="$W/sa.key" --root-ca-file="$W/certs/apiserver.crt"
start scheduler kube-scheduler --kubeconfig="$W/kubeconfig" --leader-elect=false --cert-dir="$W/certs"
start names "${PYTHON:-python3}" "$here/names.py" "$W/kubeconfig" 10.250.0.1
for image in "$images"/*.tar; do
  timeout 1200 ctr -a /run/containerd/c.sock -n k8s.io images import "$image" >> "$W/images.log" 2>&1 \
    || fail "containerd does not take $image" images
done
start kubelet kubelet --config="$W/kubelet.yaml" --kubeconfig="$W/kubeconfig" --container-runtime=remote \
  --container-runtime-endpoint=unix:///run/containerd/c.sock --root-dir="$W/kubelet" --cert-dir="$W/certs" \
  --hostname-override=node1 --node-ip=10.250.0.1
chown 10001:10001 "$W/volume"
kubectl apply -f - > "$W/volume.log" 2>&1 << Y || fail "no volume" volume
apiVersion: v1
kind: PersistentVolume
metadata: {name: runs}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: test
  hostPath: {path: "$W/volume"}
Y
echo "$(date +%T) the cluster is there: $(kubectl version --short 2> /dev/null | grep Server)"

"$@" &
command=$!
status=0
wait -n -p ended "$command" "${pids[@]}" || status=$?
if [ "$ended" = "$command" ]; then command=; exit "$status"; fi
echo "FAIL: a part of the cluster ended with $status; the logs are in $W"
exit 1
