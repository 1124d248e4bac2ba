//! Arguments of `serve`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use crate::hub::{Dtype, ModelName};

use super::{RowArgs, TuningArgs};

#[derive(Debug, Args)]
#[command(after_help = SERVE_HELP)]
pub(crate) struct ServeArgs {
    /// Model directory, or hf:ORGANISATION/NAME; may be repeated. The model's name in requests is
    /// the name of its directory
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

    /// Address to serve HTTP on. Default: 127.0.0.1:8080, only for this machine
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<SocketAddr>,

    /// Also answer requests on trommel.classify.NAME of this NATS server
    #[arg(long, value_name = "URL")]
    pub(crate) nats: Option<String>,

    /// Also classify frames of this live source, * for all; may be repeated. Needs --nats
    #[arg(long, value_name = "SOURCE", requires = "nats")]
    pub(crate) live: Vec<String>,

    /// File with the token that requests must send. Default: TROMMEL_SERVE_TOKEN, else none
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,

    /// Web address under which requests may name images, such as https://host/path/; may be
    /// repeated. Default: none
    #[arg(long, value_name = "URL")]
    pub(crate) allow_url: Vec<String>,

    /// Certificate chain for TLS, PEM
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_certificate: Option<PathBuf>,

    /// Private key of the certificate, PEM
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
The response for an image is its row, as JSON: curl --data-binary @cat.jpg
http://127.0.0.1:8080/v1/models/NAME/classify. The same models are served by the Open Inference Protocol
below /v2; /openapi.json describes both. The settings of rows above are the defaults of requests.";
