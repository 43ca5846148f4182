#!/usr/bin/env bash
# Run uv with what pip is configured with on this machine: index, folders of wheels, certificate.
# usage: uv.sh UV ARGUMENTS...   Variables of uv itself (UV_DEFAULT_INDEX, UV_FIND_LINKS, ...) win.
set -euo pipefail
uv=$1
shift

# The value of one of pip's settings, from its environment variable or its files.
pip_setting() { # NAME VARIABLE
  if [ -n "${!2:-}" ]; then echo "${!2}"; else "${PYTHON:-python3}" -m pip config get "global.$1" 2>/dev/null || true; fi
}
# pip separates several values by spaces or lines, uv by commas.
listed() { tr -s '[:space:]' ',' <<< "$1" | sed 's/,$//'; }

: "${UV_DEFAULT_INDEX:=$(pip_setting index-url PIP_INDEX_URL)}"
: "${UV_FIND_LINKS:=$(listed "$(pip_setting find-links PIP_FIND_LINKS)")}"
: "${SSL_CERT_FILE:=$(pip_setting cert PIP_CERT)}"
# An empty variable would be an empty setting.
[ -n "$UV_DEFAULT_INDEX" ] && export UV_DEFAULT_INDEX || unset UV_DEFAULT_INDEX
[ -n "$UV_FIND_LINKS" ] && export UV_FIND_LINKS || unset UV_FIND_LINKS
[ -n "$SSL_CERT_FILE" ] && export SSL_CERT_FILE || unset SSL_CERT_FILE

# A CPU build of torch: from a folder of wheels that holds one, otherwise from PyTorch's own index.
if [ "${TORCH_BUILD:-}" = cpu ] && [ -z "${TORCH_INDEX:-}" ]; then
  case "$(IFS=,; for folder in ${UV_FIND_LINKS:-}; do ls "$folder" 2>/dev/null; done)" in
    *torch-*+cpu*) ;;
    *) export UV_TORCH_BACKEND=cpu ;;
  esac
elif [ -n "${TORCH_INDEX:-}" ]; then
  export UV_INDEX="torch=$TORCH_INDEX" UV_INDEX_STRATEGY=unsafe-best-match
fi
exec "$uv" "$@"
