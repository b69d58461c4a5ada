#!/usr/bin/env bash
# The OpenAI routes with curl: `./curl.sh MODEL`. It lists the models of the server and asks MODEL a question.
set -euo pipefail
model=${1:?give the name of a model}
url=${TINKER_BASE_URL:-http://127.0.0.1:8000}
key=${TINKER_API_KEY:-$(cat tinsmith-data/api-key)}

curl --fail-with-body --silent --show-error "$url/oai/api/v1/models" --header "Authorization: Bearer $key"
curl --fail-with-body --silent --show-error "$url/oai/api/v1/chat/completions" \
    --header "Authorization: Bearer $key" --header "Content-Type: application/json" --data @- <<END
{"model": "$model", "messages": [{"role": "user", "content": "What does a tinsmith mend?"}], "max_tokens": 100}
END
