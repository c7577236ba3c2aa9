# The server of a model, `cps serve`, as a container that needs no GPU:
#
#     docker build -t cps --build-arg TORCH_INDEX=... .
#     docker run -p 127.0.0.1:8000:8000 -v "$PWD/models:/models:ro" cps
#
# It serves /models/model.cps, and loads it again when it changes. TORCH_INDEX is the address of torch's packages without
# CUDA, which pytorch.org/get-started shows for "CPU"; without it, the image has those with CUDA and is far larger.
FROM python:3.13-slim AS build
WORKDIR /project
COPY pyproject.toml setup.py README.md LICENSE constraints.txt ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim
ARG TORCH_INDEX=""
COPY constraints.txt /tmp/
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
    torch torchvision
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt \
    "continual-prune-and-select[serve] @ file://$(echo /wheels/*.whl)" \
    && rm -r /wheels /tmp/constraints.txt \
    && useradd --uid 10001 --no-create-home cps
USER 10001
EXPOSE 8000
VOLUME /models
HEALTHCHECK --start-period=60s CMD ["python", "-c", \
    "import json, urllib.request as u; assert json.load(u.urlopen('http://127.0.0.1:8000/health'))['problem'] is None"]
ENTRYPOINT ["cps", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["/models/model.cps"]
