#!/usr/bin/env bash
# Fetches what node.sh needs, for Debian 12 on amd64, from Debian's archive: get.sh DIRECTORY
#
# etcd, containerd, runc, the CNI plugins and kubectl are Debian's packages, unpacked and not installed.
# Kubernetes (1.20) is built from Debian's source with Debian's Go: 15 CPU minutes. Needs root and 6 GB
# of disk until it is built (PARALLEL=1 builds with less memory). gcc, make, rsync and a few more are
# installed where they are missing. apt's own settings stay as they are: the lists of packages that this
# needs, sources too, are in DIRECTORY.
set -Eeuo pipefail
mkdir -p "$1"
dir=$(cd "$1" && pwd)
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
say() { printf '%s %s\n' "$(date +%T)" "$*"; }
log=$dir/get.log
quietly() { echo "+ $*" >>"$log"; "$@" >>"$log" 2>&1; }
trap 'echo "FAIL: get.sh, line $LINENO; $log ends with:" >&2; tail -n 20 "$log" >&2' ERR
: >"$log"

missing=()
for program in gcc:gcc make:make rsync:rsync ip:iproute2 openssl:openssl curl:curl; do
  command -v "${program%:*}" >/dev/null || missing+=("${program#*:}")
done
[ -e /usr/include/stdio.h ] || missing+=(libc6-dev)
[ -n "$(ldconfig -p | grep libseccomp.so.2)" ] || missing+=(libseccomp2)
if [ ${#missing[@]} -gt 0 ]; then
  say "installing ${missing[*]}"
  quietly apt-get update -qq
  quietly env DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "${missing[@]}"
fi

say "fetching Debian's etcd, containerd, runc, kubectl, Go and the source of Kubernetes"
rm -rf "$dir"/{debs,x,apt,go,goroot}
mkdir -p "$dir"/{debs,x/k8s,apt/lists/partial,apt/cache/archives/partial,go/src/k8s.io}
for kind in deb deb-src; do
  echo "$kind [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main"
done >"$dir/apt/sources.list"
apt=(-o Dir::Etc::SourceList="$dir/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
  -o Dir::State::Lists="$dir/apt/lists" -o Dir::Cache="$dir/apt/cache" -o Acquire::Languages=none
  -o Acquire::Retries=3 -o APT::Sandbox::User=root)
cd "$dir/debs"
quietly apt-get "${apt[@]}" update
quietly apt-get "${apt[@]}" download golang-1.19-go golang-1.19-src etcd-server containerd runc \
  containernetworking-plugins kubernetes-client
for package in *.deb; do dpkg -x "$package" "$dir/x"; done
quietly apt-get "${apt[@]}" source --download-only kubernetes
tar -C "$dir/go/src/k8s.io" -xf kubernetes_*.orig.tar.*
mv "$dir"/go/src/k8s.io/kubernetes-* "$dir/go/src/k8s.io/kubernetes"

# Go's own tree, whose parts Debian keeps in two places.
cp -a "$dir/x/usr/share/go-1.19" "$dir/goroot"
cp -a "$dir"/x/usr/lib/go-1.19/{bin,VERSION} "$dir/goroot/"
cp -a "$dir"/x/usr/lib/go-1.19/pkg/{linux_amd64,tool} "$dir/goroot/pkg/"

cd "$dir/go/src/k8s.io/kubernetes"
version=v1.20.2 flags="-s -w"
for package in k8s.io/kubernetes/vendor/k8s.io/{component-base/version,client-go/pkg/version}; do
  flags+=" -X $package.gitVersion=$version -X $package.gitMajor=1 -X $package.gitMinor=20"
done
export GOROOT=$dir/goroot PATH=$dir/goroot/bin:$PATH GOCACHE=$dir/gocache GOPATH=$dir/go HOME=$dir \
  CGO_ENABLED=0 GO111MODULE=off GOFLAGS= KUBE_GIT_VERSION=$version KUBE_GIT_COMMIT=0 \
  KUBE_GIT_TREE_STATE=archive KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=20 GOMAXPROCS="${PARALLEL:-$(nproc)}"
say "building Kubernetes: its generated files"
quietly make generated_files
for program in kube-apiserver kube-controller-manager kube-scheduler kubelet; do
  say "building $program"
  quietly go build -p "$GOMAXPROCS" -ldflags "$flags" -o "$dir/x/k8s/" "k8s.io/kubernetes/cmd/$program"
done
rm -rf "$dir"/{gocache,goroot,go,debs,apt}
rm -rf "$dir"/x/usr/share/{go-1.19,doc,man} "$dir"/x/usr/lib/go-1.19
touch "$dir/x/ready"
say "built: $(du -sh "$dir/x" | cut -f1) in $dir/x"
