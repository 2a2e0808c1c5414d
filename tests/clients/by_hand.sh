#!/usr/bin/env bash
# Installs a client that is too large for CI in a folder of its own, and lets it talk to a running server (make run) for
# 21 seconds: by_hand.sh CLIENT SERVICE [URL] [FOLDER]
#   CLIENT   livekit-python (416 MB), livekit-node (293 MB) or pipecat (450 MB)
#   SERVICE  live or realtime
#   URL      default http://127.0.0.1:8006/v1
#   FOLDER   where the client is installed; default .clients-CLIENT
# Right are four utterances: hello how can i help you, two plus three is five, the sky is blue, you are welcome.
set -euo pipefail
cd "$(dirname "$0")/../.."
client=$1 service=$2 url=${3:-http://127.0.0.1:8006/v1}
folder=$(realpath -m "${4:-.clients-$client}")
sound=$folder/questions.wav
mkdir -p "$folder"
# LiveKit's client for Node needs 24 kHz.
.venv/bin/python - tools/duplane/tools/talk/samples/questions.wav "$sound" <<'PYTHON'
import sys

import soundfile
import soxr

samples, rate = soundfile.read(sys.argv[1], dtype="int16")
soundfile.write(sys.argv[2], soxr.resample(samples, rate, 24_000), 24_000, "PCM_16")
PYTHON

python_packages() {
  [ -x "$folder/bin/python" ] || python3 -m venv "$folder"
  "$folder/bin/pip" install --quiet --disable-pip-version-check "$@"
}

case $client in
  livekit-python)
    python_packages livekit-plugins-openai==1.8.9
    exec "$folder/bin/python" tests/clients/livekit_agents.py "$service" "$url" "$sound"
    ;;
  pipecat)
    python_packages 'pipecat-ai[openai,websocket]==1.14.0'
    exec "$folder/bin/python" tests/clients/pipecat_services.py "$service" "$url" "$sound"
    ;;
  livekit-node)
    cp tests/clients/livekit_agents.mjs "$folder"
    cd "$folder"
    npm install --no-save --no-audit --no-fund @livekit/agents@1.9.0 @livekit/agents-plugin-openai@1.9.0
    exec node livekit_agents.mjs "$service" "$url" "$sound"
    ;;
  *)
    echo "unknown client $client" >&2
    exit 2
    ;;
esac
