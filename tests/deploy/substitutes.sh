#!/usr/bin/env bash
# What the images need where only package registries can be reached, no registry of images. Into
# DEPLOY_DIR, once:
#
#   base.tar        Debian 12 with its Python 3.11, in place of python:3.11-slim
#   prometheus.tar  Debian 12 with its Prometheus 2.42, in place of prom/prometheus
#   wheels/         the wheels of requirements/cpu.lock and build.lock, with hashes checked
#
# Needs mmdebstrap, Debian's mirrors, and a pip that finds torch's CPU wheel (TORCH_INDEX, PIP_FIND_LINKS).
set -euo pipefail
cd "$(dirname "$0")/../.."
say() { printf '%s %s\n' "$(date +%T)" "$*"; }
quietly() { "$@" >"$DEPLOY_DIR/substitutes.log" 2>&1 || { tail -20 "$DEPLOY_DIR/substitutes.log" >&2; exit 2; }; }

image() {  # NAME PACKAGES: a root file system without package lists and documentation
  [ -e "$DEPLOY_DIR/$1.tar" ] && return
  say "making $1.tar: Debian 12 with $2"
  quietly timeout 900 mmdebstrap --variant=minbase --mode=root --include="$2" \
    --dpkgopt=path-exclude='/usr/share/doc/*' --dpkgopt=path-exclude='/usr/share/man/*' \
    --dpkgopt=path-exclude='/usr/share/locale/*' bookworm "$DEPLOY_DIR/$1.part.tar"
  mv "$DEPLOY_DIR/$1.part.tar" "$DEPLOY_DIR/$1.tar"
}

image base python3,python3-venv
image prometheus prometheus
locks=$(cat requirements/cpu.lock requirements/build.lock | sha256sum | cut -c1-16)
if [ ! -e "$DEPLOY_DIR/wheels/$locks" ]; then
  say "downloading the wheels of requirements/cpu.lock"
  rm -rf "$DEPLOY_DIR/wheels" && mkdir -p "$DEPLOY_DIR/wheels"
  for name in cpu build; do
    quietly timeout 1800 python3 -m pip download --quiet --no-deps --require-hashes --only-binary :all: \
      --python-version 3.11 --dest "$DEPLOY_DIR/wheels" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
      --requirement "requirements/$name.lock"
  done
  touch "$DEPLOY_DIR/wheels/$locks"
fi
