#!/bin/sh
# Checks an image that was built: check_image.sh IMAGE
# No package or library has a licence that is not allowed, the processes have no rights and a
# read-only file system, and after SIGTERM they end with exit code 0. Needs docker or podman.
set -eu

image=$1
tool=${CONTAINER_TOOL:-docker}
rights="--read-only --cap-drop ALL --security-opt no-new-privileges --tmpfs /tmp
  --tmpfs /var/lib/duplane:uid=10001,gid=10001"
root=$(cd "$(dirname "$0")/../.." && pwd)

echo "size: $($tool image inspect --format '{{.Size}}' "$image") bytes"

# The libraries of FFmpeg are in the worker's image only.
directories=$($tool run --rm --network none --entrypoint sh "$image" -c \
  'ls -d /opt/duplane/lib/python3.*/site-packages; ls -d /opt/ffmpeg/lib 2>/dev/null || true')
# shellcheck disable=SC2086  each word is an argument
$tool run --rm --network none $rights --volume "$root/tools/supply:/supply:ro" --entrypoint python \
  "$image" /supply/licences.py $directories

case $($tool image inspect --format '{{index .Config.Labels "org.opencontainers.image.title"}}' "$image") in
  *worker*) command="worker --checkpoint /models/default" ;;
  *) command="scheduler --store memory:" ;;
esac
# shellcheck disable=SC2086
container=$($tool run --detach --network none $rights "$image" $command)
trap '$tool rm --force "$container" >/dev/null' EXIT
begin=$(date +%s)
until $tool exec "$container" python -c "import http.client as http
to = http.HTTPConnection('127.0.0.1', 8080, timeout=4)
to.request('GET', '/startupz')
exit(to.getresponse().status != 200)" 2>/dev/null; do
  if [ $(($(date +%s) - begin)) -gt 120 ]; then
    $tool logs "$container"
    echo "$command has not started after 120 s" >&2
    exit 1
  fi
  sleep 0.5
done
$tool exec "$container" sh -c 'test "$(id -u)" = 10001 && ! touch /opt/duplane/file 2>/dev/null'
$tool stop --time 60 "$container" >/dev/null
code=$($tool inspect --format '{{.State.ExitCode}}' "$container")
echo "exit code after SIGTERM: $code"
test "$code" = 0
