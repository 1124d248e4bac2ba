//! Arguments of `serve`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use crate::hub::{Dtype, ModelName};

use super::{RowArgs, TuningArgs};

#[derive(Debug, Args)]
#[command(after_help = SERVE_HELP)]
pub(crate) struct ServeArgs {
    /// Model directory, or hf:ORGANISATION/NAME; may be repeated. Requests name a model as its directory is
    /// named
    #[arg(
        short,
        long,
        value_name = "MODEL",
        required = true,
        env = "TROMMEL_MODEL"
    )]
    pub(crate) model: Vec<ModelName>,

    /// Precision of a model of the hub, as for classify
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub(crate) dtype: Option<Dtype>,

    /// Address that answers over HTTP. Default: 127.0.0.1:8080, for this machine alone
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<SocketAddr>,

    /// Answer over this NATS server too, on trommel.classify.NAME
    #[arg(long, value_name = "URL")]
    pub(crate) nats: Option<String>,

    /// Classify frames of this live source too, * for all; may be repeated. Needs --nats
    #[arg(long, value_name = "SOURCE", requires = "nats")]
    pub(crate) live: Vec<String>,

    /// File with the token that requests have to bring. Default: TROMMEL_SERVE_TOKEN, else none
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,

    /// Place of the web that requests may name images by, such as https://host/path/; may be repeated.
    /// Default: none
    #[arg(long, value_name = "URL")]
    pub(crate) allow_url: Vec<String>,

    /// Certificate chain for TLS, PEM
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_certificate: Option<PathBuf>,

    /// Its private key, PEM
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,

    /// Address that answers /metrics, /healthz and /readyz, such as 0.0.0.0:9464. Default: none
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) telemetry_listen: Option<SocketAddr>,

    /// OpenTelemetry collector that traces are sent to, such as http://localhost:4317. Default:
    /// none
    #[arg(long, value_name = "URL")]
    pub(crate) otlp_endpoint: Option<String>,

    #[command(flatten)]
    pub(crate) rows: RowArgs,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,
}

const SERVE_HELP: &str = "\
The answer for an image is its row, as JSON: curl --data-binary @cat.jpg
http://127.0.0.1:8080/v1/models/NAME/classify. Clients of the Open Inference Protocol find the same
models below /v2; /openapi.json describes both. The settings of rows above are what requests get that
say nothing else.";
