#!/usr/bin/env bash
# Fetches what node.sh needs, for Debian 12 on amd64, from Debian's archive: get.sh DIRECTORY
#
# etcd, containerd, runc and the CNI plugins are Debian's packages, unpacked and not installed. Kubernetes
# (1.20) is built from Debian's source with Debian's Go: 5 minutes on two quiet cores. Needs root,
# deb-src lines for bookworm in apt's sources, gcc, make, rsync and 6 GB of disk.
set -euo pipefail
mkdir -p "$1"/{debs,x,images,go/src/k8s.io}
dir=$(cd "$1" && pwd)
cd "$dir/debs"
apt-get download -qq golang-1.19-go golang-1.19-src etcd-server containerd runc containernetworking-plugins
for package in *.deb; do dpkg -x "$package" "$dir/x"; done
apt-get source -qq --download-only kubernetes
tar -C "$dir/go/src/k8s.io" -xf kubernetes_*.orig.tar.gz
mv "$dir"/go/src/k8s.io/kubernetes-* "$dir/go/src/k8s.io/kubernetes"

# Go's own tree, whose parts Debian keeps in two places.
cp -a "$dir/x/usr/share/go-1.19" "$dir/goroot"
cp -a "$dir"/x/usr/lib/go-1.19/{bin,VERSION} "$dir/goroot/"
cp -a "$dir/x/usr/lib/go-1.19/pkg/." "$dir/goroot/pkg/"

cd "$dir/go/src/k8s.io/kubernetes"
version=v1.20.2
for file in staging/src/k8s.io/{component-base/version,client-go/pkg/version}/base.go; do
  sed -i -e "s/gitMajor string = \".*\"/gitMajor string = \"1\"/" \
    -e "s/gitMinor string = \".*\"/gitMinor string = \"20\"/" \
    -e "s/gitVersion *= \".*\"/gitVersion = \"$version\"/" "$file"
done
export GOROOT=$dir/goroot PATH=$dir/goroot/bin:$PATH GOCACHE=$dir/gocache GOPATH=$dir/go HOME=$dir \
  CGO_ENABLED=0 GO111MODULE=off GOFLAGS= KUBE_GIT_VERSION=$version KUBE_GIT_COMMIT=0 \
  KUBE_GIT_TREE_STATE=archive KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=20
make generated_files
mkdir -p "$dir/x/k8s"
for program in kube-apiserver kube-controller-manager kube-scheduler kubelet; do
  go build -ldflags '-s -w' -o "$dir/x/k8s/" "k8s.io/kubernetes/cmd/$program"
done
rm -rf "$dir/gocache" "$dir/goroot" "$dir/go"
touch "$dir/x/ready"
