//! The servers of a prompt: which one is asked next, how many requests each gets, and what is
//! retried.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rand::Rng;
use tokio::sync::Notify;
use trommel_types::{Scalar, Scores};

use super::answer::{self, Reply};
use super::client::{AskClient, Fault};
use super::pace::Pace;
use super::request::Template;
use super::tally::{Ended, PromptStats, Tally};
use crate::{EngineStats, InferError, InferErrorKind, Prompt};

/// Most failed or timed-out requests per image.
const ATTEMPTS: u32 = 4;
/// First and longest wait after a failure.
const BASE: Duration = Duration::from_millis(200);
const CAP: Duration = Duration::from_secs(5);
/// Longest pause of a busy server, whatever it asks for.
const LONGEST_BUSY: Duration = Duration::from_secs(60);

/// A label with the values of additional columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Label and score.
    pub scores: Scores,
    /// Values of [`Engine::columns`](crate::Engine::columns), in their order.
    pub columns: Vec<Scalar>,
}

/// A running prompt.
pub(crate) struct Servers {
    prompt: Prompt,
    template: Template,
    client: AskClient,
    tally: Tally,
    state: Mutex<State>,
    /// Notified when a request ends, so that another one can begin.
    changed: Notify,
    since: Instant,
}

struct State {
    servers: Vec<Server>,
    /// When the last answer arrived, or requests began after a pause.
    progress: Instant,
    in_flight: usize,
    waiting: usize,
    /// The last error, for people.
    trouble: String,
}

struct Server {
    pace: Pace,
    in_flight: usize,
    /// Not asked before this time.
    rest_until: Option<Instant>,
    /// Successive times that it was busy or unreachable.
    setbacks: u32,
}

/// A permit for a request to a server, until dropped.
struct Turn<'a> {
    servers: &'a Servers,
    number: usize,
    turn: u64,
    begun: Instant,
}

enum Next {
    Ask { number: usize, turn: u64 },
    Wait(Option<Instant>),
    Outage(String),
}

impl Servers {
    /// Checks the servers, at least one of which has to be reachable.
    ///
    /// # Errors
    /// If there is no key, or no server.
    pub(crate) fn start(prompt: Prompt) -> Result<Self, InferError> {
        let settings = prompt.settings();
        let key = settings.key.as_ref();
        let secret = key.map(|key| key.read()).transpose();
        let secret = secret.map_err(|why| prompt.error(InferErrorKind::ModelConfig, &why))?;
        let named = key.map_or_else(String::new, ToString::to_string);
        let look = AskClient::new(secret.clone(), named.clone());
        prompt.look(look)?;
        let server = || Server {
            pace: Pace::new(settings.max_concurrency),
            in_flight: 0,
            rest_until: None,
            setbacks: 0,
        };
        let servers = settings.urls.iter().map(|_| server()).collect();
        let now = Instant::now();
        Ok(Self {
            template: Template::new(&settings.asked),
            client: AskClient::new(secret, named),
            tally: Tally::new(prompt.name()),
            state: Mutex::new(State {
                servers,
                progress: now,
                in_flight: 0,
                waiting: 0,
                trouble: String::new(),
            }),
            changed: Notify::new(),
            since: now,
            prompt,
        })
    }

    pub(crate) fn prompt(&self) -> &Prompt {
        &self.prompt
    }

    /// Asks about an image until there is an answer or a permanent failure.
    pub(crate) async fn ask(&self, image: Bytes) -> Result<Answer, InferError> {
        let settings = self.prompt.settings();
        let body = self.template.body(&image);
        drop(image);
        // Waits for room do not count: a long queue is not the image's fault.
        let mut left = settings.deadline;
        let mut failures = 0;
        loop {
            let turn = self.enter().await?;
            let url = &settings.urls[turn.number];
            let time = settings.timeout.min(left);
            let ended = self.client.ask(url, body.clone(), time).await;
            let took = turn.begun.elapsed();
            left = left.saturating_sub(took);
            let ended =
                ended.and_then(|body| answer::read(&body, &settings.asked).map_err(Fault::Failed));
            let fault = match ended {
                Ok(reply) => {
                    turn.answered(took);
                    return self.answer(reply);
                }
                Err(fault) => fault,
            };
            self.note(&turn, &fault);
            let number = turn.number;
            drop(turn);
            let kind = match &fault {
                Fault::Refused(_) => {
                    return Err(self.error(InferErrorKind::ModelFailed, number, &fault));
                }
                Fault::Hopeless(_) => {
                    return Err(self.error(InferErrorKind::Settings, number, &fault));
                }
                // The server pauses, and so does this image.
                Fault::Unreachable(_) | Fault::Busy { .. } => continue,
                Fault::TimedOut => InferErrorKind::Timeout,
                Fault::Failed(_) => InferErrorKind::ModelFailed,
            };
            failures += 1;
            if failures >= ATTEMPTS || left.is_zero() {
                self.lock().progress = Instant::now(); // it ends in a row
                return Err(self.error(kind, number, &fault));
            }
            let wait = jittered(failures).min(left);
            left = left.saturating_sub(wait);
            tokio::time::sleep(wait).await;
        }
    }

    fn answer(&self, reply: Reply) -> Result<Answer, InferError> {
        let Reply { tokens, scores } = reply;
        let signed = |tokens: u64| Scalar::Int(i64::try_from(tokens).unwrap_or(i64::MAX));
        let columns = match tokens {
            Some(tokens) => {
                self.tally.tokens(tokens);
                vec![signed(tokens.read), signed(tokens.written)]
            }
            None => vec![Scalar::Null, Scalar::Null],
        };
        match scores {
            Ok(scores) => Ok(Answer { scores, columns }),
            Err(why) => Err(self.prompt.error(InferErrorKind::ModelFailed, &why)),
        }
    }

    fn error(&self, kind: InferErrorKind, number: usize, fault: &Fault) -> InferError {
        let settings = self.prompt.settings();
        let url = &settings.urls[number];
        let why = match fault {
            Fault::TimedOut => format!(
                "{url} gave no answer within {:?} (prompt.timeout, deadline)",
                settings.timeout.min(settings.deadline)
            ),
            fault => format!("{url}: {}", fault.why()),
        };
        self.prompt.error(kind, &why)
    }

    /// Waits until a server may be asked.
    async fn enter(&self) -> Result<Turn<'_>, InferError> {
        let waiting = Waiting::new(self);
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let next = self
                .lock()
                .next(Instant::now(), self.prompt.settings().outage);
            let until = match next {
                Next::Ask { number, turn } => {
                    drop(waiting);
                    self.changed.notify_one(); // there may be room for another
                    self.tally.begin();
                    return Ok(Turn {
                        servers: self,
                        number,
                        turn,
                        begun: Instant::now(),
                    });
                }
                Next::Outage(why) => {
                    return Err(self.prompt.error(InferErrorKind::Unreachable, &why));
                }
                Next::Wait(until) => until,
            };
            match until {
                Some(until) => {
                    let until = tokio::time::Instant::from_std(until);
                    drop(tokio::time::timeout_at(until, changed).await);
                }
                None => changed.await,
            }
        }
    }

    /// Counts a fault of a server, and pauses it if necessary.
    fn note(&self, turn: &Turn<'_>, fault: &Fault) {
        let url = &self.prompt.settings().urls[turn.number];
        let ended = match fault {
            Fault::Unreachable(_) => Ended::Unreachable,
            Fault::Busy { .. } => Ended::Busy,
            Fault::Failed(_) => Ended::Failed,
            Fault::TimedOut => Ended::TimedOut,
            Fault::Refused(_) | Fault::Hopeless(_) => Ended::Refused,
        };
        self.tally.ended(ended);
        let mut state = self.lock();
        if ended == Ended::Refused {
            state.progress = Instant::now();
            return;
        }
        state.trouble = format!("{url}: {}", fault.why());
        let server = &mut state.servers[turn.number];
        let is_first = server.setbacks == 0;
        let rest = match fault {
            Fault::Unreachable(_) => Some(jittered(server.setbacks + 1)),
            Fault::Busy { after, .. } => {
                let own = || jittered(server.setbacks + 1);
                Some(after.map_or_else(own, |after| after.min(LONGEST_BUSY)))
            }
            _ => None,
        };
        if ended != Ended::Failed {
            server.pace.refused(turn.turn);
        }
        if let Some(rest) = rest {
            server.setbacks += 1;
            let until = Instant::now() + rest;
            server.rest_until = Some(server.rest_until.map_or(until, |known| known.max(until)));
        }
        drop(state);
        if rest.is_some() && is_first {
            tracing::warn!(
                server = url,
                why = fault.why(),
                "the server is left alone for a while"
            );
        }
    }

    /// The requests so far.
    pub(crate) fn prompt_stats(&self) -> PromptStats {
        let state = self.lock();
        let limits = state.servers.iter().map(|server| server.pace.limit());
        PromptStats {
            concurrency: limits.sum::<usize>() as u64,
            servers: state.servers.len() as u64,
            ..self.tally.read(self.prompt.settings().prices)
        }
    }

    /// The same as engine statistics: an instance is a request in flight.
    pub(crate) fn stats(&self) -> EngineStats {
        let PromptStats {
            answers,
            requests,
            peak,
            ..
        } = self.prompt_stats();
        let instances = usize::try_from(peak).unwrap_or(usize::MAX).max(1);
        let (compute, elapsed) = (self.tally.took(), self.since.elapsed());
        EngineStats {
            instances,
            max_batch: 1,
            batches: answers,
            images: answers,
            retried: requests.saturating_sub(answers),
            compute,
            idle: elapsed
                .saturating_mul(u32::try_from(instances).unwrap_or(u32::MAX))
                .saturating_sub(compute),
            fill: if answers == 0 { 0.0 } else { 1.0 },
            ..EngineStats::default()
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Servers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Servers")
            .field("prompt", &self.prompt)
            .finish_non_exhaustive()
    }
}

/// An image waiting for its turn.
struct Waiting<'a>(&'a Servers);

impl<'a> Waiting<'a> {
    fn new(servers: &'a Servers) -> Self {
        let mut state = servers.lock();
        if state.waiting == 0 && state.in_flight == 0 {
            state.progress = Instant::now();
        }
        state.waiting += 1;
        drop(state);
        Self(servers)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.lock().waiting -= 1;
    }
}

impl State {
    /// What an additional image should do. An unreachable server gets one request at a time until
    /// it answers.
    fn next(&mut self, now: Instant, outage: Duration) -> Next {
        if now.duration_since(self.progress) > outage {
            let why = format!(
                "no server has answered for {outage:?} (prompt.outage); the last error was {}; run the same command again once one is up",
                self.trouble
            );
            return Next::Outage(why);
        }
        let has_room = |server: &Server| match server.setbacks {
            0 => server.in_flight < server.pace.limit(),
            _ => server.in_flight == 0,
        };
        let is_awake = |server: &Server| server.rest_until.is_none_or(|until| until <= now);
        let load = |server: &Server| server.in_flight as f64 / server.pace.limit() as f64;
        let free = self.servers.iter().enumerate();
        let free = free.filter(|(_, server)| has_room(server) && is_awake(server));
        let chosen = free.min_by(|(_, a), (_, b)| {
            let sound = a.setbacks.min(1).cmp(&b.setbacks.min(1));
            sound.then(load(a).total_cmp(&load(b)))
        });
        if let Some(number) = chosen.map(|(number, _)| number) {
            let server = &mut self.servers[number];
            server.in_flight += 1;
            self.in_flight += 1;
            let turn = server.pace.turn();
            return Next::Ask { number, turn };
        }
        let wakes = self.servers.iter().filter_map(|server| server.rest_until);
        let wakes = wakes.filter(|until| *until > now).min();
        // While no answer comes, the end of patience is a reason to look again too.
        let patience = self.progress + outage + Duration::from_millis(1);
        Next::Wait(Some(wakes.map_or(patience, |until| until.min(patience))))
    }
}

impl Turn<'_> {
    fn answered(&self, took: Duration) {
        self.servers.tally.ended(Ended::Answered);
        let mut state = self.servers.lock();
        state.progress = Instant::now();
        let server = &mut state.servers[self.number];
        let was_away = server.setbacks > 0;
        server.setbacks = 0;
        server.rest_until = None;
        server.pace.answered(took);
        drop(state);
        if was_away {
            self.servers.changed.notify_waiters();
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.servers.tally.over(self.begun.elapsed());
        let mut state = self.servers.lock();
        state.in_flight -= 1;
        state.servers[self.number].in_flight -= 1;
        drop(state);
        self.servers.changed.notify_one();
    }
}

impl Fault {
    fn why(&self) -> &str {
        match self {
            Self::Unreachable(why)
            | Self::Busy { why, .. }
            | Self::Failed(why)
            | Self::Refused(why)
            | Self::Hopeless(why) => why,
            Self::TimedOut => "it gave no answer in time",
        }
    }
}

/// From half of a bound to all of it; the bound doubles with each setback.
fn jittered(setbacks: u32) -> Duration {
    let bound = BASE.saturating_mul(1 << setbacks.saturating_sub(1).min(10));
    bound.min(CAP).mul_f64(rand::rng().random_range(0.5..=1.0))
}

/// Shared by the calls of an engine.
pub(crate) type SharedServers = Arc<Servers>;
