# A small S3 store for the compose file: s3s-fs, which keeps objects as files of a folder, with the
# buckets `photos` and `results`. For trying out; a real installation has a store of its own.

ARG BUILDER=rust:1.95-bookworm
ARG BASE=gcr.io/distroless/cc-debian12:nonroot

FROM ${BUILDER} AS build
RUN cargo install s3s-fs --version 0.14.1 --locked --features binary --root /built \
    && mkdir -p /image/data/photos /image/data/results

FROM ${BASE}
COPY --from=build /built/bin/s3s-fs /usr/bin/s3s-fs
COPY --from=build --chown=65532:65532 /image/data /data
USER 65532:65532
EXPOSE 8014
ENTRYPOINT ["/usr/bin/s3s-fs", "--host", "0.0.0.0", "--port", "8014"]
CMD ["--access-key", "trommel", "--secret-key", "trommel-secret", "/data"]
