#!/bin/sh
# The report is tested in a real browser. On Debian and Ubuntu, as root, this installs Chromium where there is none;
# elsewhere Selenium fetches one when the tests ask for it.
set -eu
[ -z "${REMAT_TEST_BROWSER:-}" ] || exit 0
for name in chromium chromium-browser google-chrome google-chrome-stable chrome; do
  command -v "$name" >/dev/null && exit 0
done
command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || exit 0
echo "Installing Chromium for the tests of the report"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null
