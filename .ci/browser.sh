#!/bin/sh
# Gets the browser that the tests of the report page drive (Debian's Chromium), unless it is there.
# Only root can install; everybody else is told what to run.
set -eu
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null 2>&1; then
        exit 0
    fi
done
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "tests/browser need Chromium: as root, apt-get install -y chromium" >&2
    exit 0 # those tests fail and say so; all others can run
fi
echo "installing Chromium for tests/browser" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
