use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use trommel_infer::Wanted;
use trommel_queue::Broker;
use trommel_serve::{Entrance, LiveSources, NatsService, Server, Token};
use trommel_types::RowOptions;
use trommel_worker::{Answers, LiveModel, LiveUrls, Readiness, WorkerError, start_engine};

use crate::args::ServeArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::progress_bar::LogWriter;
use crate::telemetry::Telemetry;
use crate::{model, shutdown};

/// The variable with the token, if there is no file.
const TOKEN: &str = "TROMMEL_SERVE_TOKEN";
/// Longest wait for the broker at the end.
pub(crate) const FLUSH: Duration = Duration::from_secs(2);

/// `trommel serve`: opens and warms up everything, then answers requests until a stop.
pub(crate) fn run(
    args: ServeArgs,
    mut config: Config,
    onnxruntime: Option<&Path>,
    telemetry: &Telemetry,
) -> Result<Exit> {
    let runtime = crate::runtime::on_all_cores()?;
    let readiness = Readiness::default();
    telemetry.health.has(readiness.clone());
    let stop = runtime.block_on(async {
        telemetry.health.watch();
        shutdown::on_signal()
    })?;
    let token = token(&config).context(Usage)?;
    let rows = args
        .rows
        .options(config.preprocess.reference)
        .context(Usage)?;
    if let [only] = args.model.as_slice() {
        let dir = only.folder(args.dtype, true).context(Usage)?;
        model::take_profile(&mut config, &dir);
    }
    let models = open(&args, &rows, &config, onnxruntime).context(Usage)?;
    let answers = Arc::new(Answers::start(models, &rows, &config).context(Usage)?);
    let ended = runtime.block_on(async {
        let has_live = !config.live.sources.is_empty();
        let broker = match (config.serve.nats, has_live) {
            (_, true) => Some(Broker::connect(&config.broker, "trommel serve").await),
            (true, false) => Some(Broker::connect_core(&config.broker, "trommel serve").await),
            (false, false) => None,
        };
        let broker = broker.transpose().context(Usage)?;
        let front = Front::open(
            Arc::clone(&answers),
            &config,
            &readiness,
            token,
            broker.as_ref(),
        );
        let front = front.await.context(Usage)?;
        readiness.begin();
        front.announce();
        let ended = front.run(config.shutdown.drain_timeout, stop).await;
        if let Some(broker) = broker {
            // Answers may still be on their way.
            drop(timeout(FLUSH, broker.flush()).await);
        }
        ended
    });
    // A thread may still hang in an image; it has no state to keep.
    runtime.shutdown_background();
    ended.map(|()| Exit::Success)
}

/// All protocols, open.
pub(crate) struct Front {
    server: Server,
    service: Option<NatsService>,
    live: Option<LiveSources>,
    answers: Arc<Answers>,
    readiness: Readiness,
    url: String,
}

impl Front {
    /// Listens, and registers the models with the broker if `serve.nats` is set.
    pub(crate) async fn open(
        answers: Arc<Answers>,
        config: &Config,
        readiness: &Readiness,
        token: Option<Token>,
        broker: Option<&Broker>,
    ) -> Result<Self> {
        let (serve, has_token) = (config.serve.clone(), token.is_some());
        let urls = LiveUrls::new(config)?;
        let entrance = Entrance::new(Arc::clone(&answers), serve, readiness.clone(), token, urls);
        let entrance = Arc::new(entrance);
        let server = Server::bind(Arc::clone(&entrance)).await?;
        let service = match broker {
            Some(broker) if config.serve.nats => {
                Some(NatsService::start(broker, Arc::clone(&entrance)).await?)
            }
            _ => None,
        };
        let live = match broker {
            Some(broker) if !config.live.sources.is_empty() => {
                // One image per decoding thread, and one waiting for each.
                let abreast = 2 * config.preprocess.threads();
                Some(LiveSources::start(broker, entrance, &config.live, abreast).await?)
            }
            _ => None,
        };
        let address = server.address().context("failed to listen")?;
        if !address.ip().is_loopback() && !has_token {
            tracing::warn!(
                "{address} accepts requests without a token; set one with serve.token-file or {TOKEN}"
            );
        }
        let scheme = match config.serve.tls_certificate {
            Some(_) => "https",
            None => "http",
        };
        Ok(Self {
            server,
            service,
            live,
            answers,
            readiness: readiness.clone(),
            url: format!("{scheme}://{address}"),
        })
    }

    /// Reports its address.
    pub(crate) fn announce(&self) {
        // Standard error is closed, so this cannot be reported.
        drop(writeln!(LogWriter, "trommel: answering on {}", self.url));
    }

    /// Answers until `stop` fires or the process fails, which fires `stop`; then finishes accepted
    /// requests.
    pub(crate) async fn run(self, drain_timeout: Duration, stop: CancellationToken) -> Result<()> {
        let Self {
            server,
            service,
            live,
            answers,
            readiness,
            ..
        } = self;
        let watch = async {
            tokio::select! {
                () = stop.cancelled() => {}
                () = answers.broken().cancelled() => stop.cancel(),
            }
            readiness.stop();
        };
        let over_nats = async {
            if let Some(service) = service {
                service.run(stop.clone()).await;
            }
        };
        let of_live_sources = async {
            let ended = match live {
                Some(live) => live.run(stop.clone()).await,
                None => Ok(()),
            };
            if ended.is_err() {
                stop.cancel();
            }
            ended
        };
        let late = async {
            stop.cancelled().await;
            tokio::time::sleep(drain_timeout).await;
        };
        tokio::select! {
            (_, (), (), live) = async {
                tokio::join!(watch, server.run(stop.clone()), over_nats, of_live_sources)
            } => {
                answers.cause()?;
                Ok(live?)
            }
            () = late => Err(WorkerError::DrainTimeout {
                after: drain_timeout,
            }
            .into()),
        }
    }
}

/// The models, warmed up.
fn open(
    args: &ServeArgs,
    rows: &RowOptions,
    config: &Config,
    onnxruntime: Option<&Path>,
) -> Result<Vec<LiveModel>> {
    let mut models = Vec::with_capacity(args.model.len());
    for name in &args.model {
        let dir = name.folder(args.dtype, true)?;
        let mut config = config.clone();
        // The profile of a single model was applied, including its preprocess threads.
        if args.model.len() > 1 {
            model::take_profile(&mut config, &dir);
        }
        let opened = model::load(&dir, &config, rows, onnxruntime)?;
        // Requests bring their own.
        if !opened.model.needs_labels() {
            opened.model.check(&Wanted::from(rows))?;
        }
        let name = Arc::clone(opened.model.name());
        let live = config.serve.live_options_alone(&config.infer);
        let engine = start_engine(opened.model, &config.infer, live)?;
        models.push(LiveModel {
            name,
            plan: opened.plan,
            engine: Arc::new(engine).into(),
        });
    }
    Ok(models)
}

/// The token that requests over HTTP have to bring.
pub(crate) fn token(config: &Config) -> Result<Option<Token>> {
    match &config.serve.token_file {
        Some(file) => Ok(Some(Token::read(file)?)),
        None => Ok(std::env::var(TOKEN).ok().as_deref().and_then(Token::new)),
    }
}
