#!/usr/bin/env bash
# s3rver 3.7.1 answers a request for the last bytes of an object with its first bytes.
#
# `Range: bytes=-3` asks for the last three bytes (RFC 9110, section 14.1.2). For the object 0123456789, s3rver answers
# 206 with "Content-Range: bytes 0-3/10" and 0123. S3 answers 789. The answer is no error, so who reads the end of a file
# first, as readers of Parquet and zip do, gets other bytes; only a reader that compares Content-Range notices.
# `Range: bytes=7-` and `bytes=7-9` are right.
set -euo pipefail
scratch=$(mktemp -d)
server=
finish() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    rm -rf "$scratch"
}
trap finish EXIT
export HOME=$scratch npm_config_cache=$scratch/npm
npm install --silent --no-fund --no-audit --prefix "$scratch" s3rver@3.7.1

cat >"$scratch/serve.js" <<'JS'
const S3rver = require("s3rver");
const options = { port: 0, address: "127.0.0.1", silent: true, directory: process.argv[2], configureBuckets: [{ name: "bucket" }] };
new S3rver(options).run().then(({ port }) => console.log(port));
JS
mkdir "$scratch/data"
exec 3< <(exec node --no-deprecation "$scratch/serve.js" "$scratch/data")
server=$!
read -r port <&3

url=http://127.0.0.1:$port/bucket/digits
curl --silent --fail --request PUT --data-binary 0123456789 "$url"
# The digits, and what Content-Range says of them.
asked() { curl --silent --fail --dump-header - --header "Range: bytes=$1" "$url" | tr -d '\r' | awk -F': ' 'tolower($1) == "content-range" { at = $2 } END { print $0, "as", at }'; }
for range in -3 7- 7-9; do echo "bytes=$range: $(asked "$range")"; done
[ "$(asked -3)" = "0123 as bytes 0-3/10" ]
[ "$(asked 7-)" = "789 as bytes 7-9/10" ]
[ "$(asked 7-9)" = "789 as bytes 7-9/10" ]
