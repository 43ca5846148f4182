#!/bin/sh
# Installs wheels into /opt/asyncrl so that two builds give the same files.
#   install-locked PIP_INSTALL_ARGUMENTS...
# Nothing is resolved (--no-deps): a lock file names everything, and pip refuses a file whose hash is
# not in it. SOURCE_DATE_EPOCH makes byte code carry a hash of its source instead of a time. All files
# get that time: whole seconds, which numba compares with what it has cached.
set -eu
: "${SOURCE_DATE_EPOCH:?}"
case "$*" in
  *--requirement*) set -- --require-hashes --only-binary :all: "$@" ;;
esac
pip install --no-deps --quiet "$@"
site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$site"/torch/test "$site"/torch/bin/*[Tt]est*
find /opt/asyncrl -newermt "@$SOURCE_DATE_EPOCH" \
  -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
