//! The rights of each user of the broker.

use std::fmt::Write;

use trommel_queue::{Stream, live_stream};

/// The users of an installation, and their purposes. `worker` is for processes with several roles.
const USERS: [(User, &str, &str); 9] = [
    (
        User::Ingest,
        "ingest",
        "lists sources, answers the control API, creates the streams",
    ),
    (User::Preprocess, "preprocess", "turns tasks into tensors"),
    (
        User::Infer,
        "infer",
        "turns tensors into results, of jobs and of requests",
    ),
    (User::Sink, "sink", "commits results and ends jobs"),
    (User::Worker, "worker", "all roles in one process"),
    (User::Serve, "serve", "answers requests for single images"),
    (User::Camera, "camera", "publishes frames of live sources"),
    (
        User::Submitter,
        "submitter",
        "submits jobs and follows them, and asks for the labels of single images",
    ),
    (
        User::Operator,
        "operator",
        "everything that `trommel jobs` and `trommel top` ask for",
    ),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum User {
    Ingest,
    Preprocess,
    Infer,
    Sink,
    Worker,
    Serve,
    Camera,
    Submitter,
    Operator,
}

/// The rights of a user; everything else is refused.
#[derive(Debug, Default)]
struct Rights {
    publish: Vec<String>,
    subscribe: Vec<String>,
    /// Whether it may reply to requests.
    answers: bool,
}

/// The names in the broker that rights refer to.
struct Names<'a> {
    prefix: &'a str,
    feeds: &'a [String],
}

/// The permissions in nats-server's configuration for an installation with this prefix. Passwords
/// come from the server's environment. `feeds` are the streams that jobs may follow as `nats://`
/// sources.
///
/// [`BrokerConfig`](trommel_queue::BrokerConfig) has to accept the prefix, and the feeds have to be
/// valid names.
pub fn nats_permissions(prefix: &str, feeds: &[String]) -> String {
    let names = Names { prefix, feeds };
    let account = prefix.to_ascii_uppercase();
    let mut text = format!(
        "# Who may do what on the broker; printed by `trommel nats-permissions`.\n\
         # A process connects as its user, with broker.inbox-prefix = \"_INBOX.USER\".\n\
         accounts {{\n  \"{account}\" {{\n    jetstream: enabled\n    users: [\n"
    );
    for (user, name, purpose) in USERS {
        let rights = names.rights(user, name);
        let variable = format!("{account}_NATS_{name}_PASSWORD")
            .to_ascii_uppercase()
            .replace('-', "_");
        let list = |subjects: &[String]| -> String {
            let lines = subjects
                .iter()
                .map(|subject| format!("            \"{subject}\"\n"));
            lines.collect()
        };
        let answers = match rights.answers {
            true => "          allow_responses: true\n",
            false => "",
        };
        let written = write!(
            text,
            "      # {purpose}\n      {{\n        user: {name}\n        password: ${variable}\n        permissions {{\n          publish: [\n{}          ]\n          subscribe: [\n{}          ]\n{answers}        }}\n      }}\n",
            list(&rights.publish),
            list(&rights.subscribe),
        );
        written.expect("a string takes all that is written to it");
    }
    text.push_str("    ]\n  }\n}\n");
    text
}

impl Names<'_> {
    fn rights(&self, user: User, name: &str) -> Rights {
        let prefix = self.prefix;
        let mut rights = Rights::default();
        // Separate inboxes keep a user from reading answers to others.
        rights.subscribe.push(format!("_INBOX.{name}.>"));
        rights.publish.push("$JS.API.INFO".to_owned());
        match user {
            User::Ingest | User::Preprocess | User::Infer | User::Sink => {
                self.add_role(&mut rights, user)
            }
            User::Worker => {
                for role in [User::Ingest, User::Preprocess, User::Infer, User::Sink] {
                    self.add_role(&mut rights, role);
                }
                rights.subscribe.push(format!("{prefix}.classify.*"));
                self.add_live(&mut rights.publish);
                let mut seen = std::collections::HashSet::new();
                rights
                    .publish
                    .retain(|subject| seen.insert(subject.clone()));
            }
            User::Camera => {
                rights.publish.push(format!("{prefix}.live.*"));
                self.add_live_stream(&mut rights.publish);
            }
            User::Serve => {
                self.add_common(&mut rights.publish);
                rights.publish.push(format!("{prefix}.infer.*"));
                self.add_live(&mut rights.publish);
                rights.subscribe.push(format!("{prefix}.classify.*"));
                rights.subscribe.push("$SRV.>".to_owned());
                rights.answers = true;
            }
            User::Submitter => {
                rights.publish.push(format!("{prefix}.classify.*"));
                let asks = ["submit", "status", "why", "models"];
                rights
                    .publish
                    .extend(asks.map(|asked| format!("{prefix}.api.{asked}")));
                rights.subscribe.push(format!("{prefix}.events.>"));
                rights.subscribe.push(format!("{prefix}.live.results.*"));
            }
            User::Operator => {
                rights.publish.push(format!("{prefix}.api.*"));
                rights.publish.push(format!("{prefix}.classify.*"));
                rights.subscribe.push(format!("{prefix}.events.>"));
                rights.subscribe.push(format!("{prefix}.live.results.*"));
            }
        }
        rights
    }

    fn add_role(&self, rights: &mut Rights, role: User) {
        let prefix = self.prefix;
        let publish = &mut rights.publish;
        self.add_common(publish);
        match role {
            User::Ingest => {
                self.add_ingest(publish);
                rights.subscribe.push(format!("{prefix}.api.*"));
                rights.subscribe.push("$SRV.>".to_owned());
                rights.answers = true;
            }
            User::Preprocess => {
                self.add_consumer(publish, Stream::Tasks);
                publish.push(format!("{prefix}.tensors.>"));
                publish.push(format!("{prefix}.results.>"));
                self.add_fault(publish, "preprocess", Stream::Tasks);
                self.add_keys(publish, &["job.*", "tried.preprocess.>"]);
            }
            User::Infer => {
                self.add_consumer(publish, Stream::Tensors);
                publish.push(format!("{prefix}.results.>"));
                self.add_fault(publish, "infer", Stream::Tensors);
                self.add_keys(publish, &["job.*", "tried.infer.>"]);
                rights.subscribe.push(format!("{prefix}.infer.*"));
                rights.answers = true;
            }
            _ => {
                self.add_consumer(publish, Stream::Results);
                publish.push(format!(
                    "$JS.API.CONSUMER.DELETE.{}.*",
                    self.stream(Stream::Results)
                ));
                self.add_end_of_job(publish);
                self.add_fault(publish, "sink", Stream::Results);
            }
        }
    }

    /// What every role does: look at the streams, read and watch records, and send heartbeats.
    fn add_common(&self, publish: &mut Vec<String>) {
        let bucket = format!("KV_{}-jobs", self.prefix);
        let streams = Stream::ALL.map(|stream| self.stream(stream));
        for stream in streams.iter().chain([&bucket]) {
            publish.push(format!("$JS.API.STREAM.INFO.{stream}"));
        }
        publish.extend([
            format!("$JS.API.STREAM.MSG.GET.{bucket}"),
            format!("$JS.API.DIRECT.GET.{bucket}.>"),
            format!("$JS.API.CONSUMER.CREATE.{bucket}"),
            format!("$JS.API.CONSUMER.CREATE.{bucket}.>"),
            format!("$JS.API.CONSUMER.INFO.{bucket}.*"),
            format!("$JS.API.CONSUMER.MSG.NEXT.{bucket}.*"),
            format!("$JS.API.CONSUMER.DELETE.{bucket}.*"),
            format!("$JS.FC.{bucket}.>"),
        ]);
        self.add_keys(publish, &["worker.*"]);
    }

    fn add_ingest(&self, publish: &mut Vec<String>) {
        let prefix = self.prefix;
        for stream in Stream::ALL {
            publish.push(format!("$JS.API.STREAM.CREATE.{}", self.stream(stream)));
        }
        publish.push(format!("$JS.API.STREAM.CREATE.KV_{prefix}-jobs"));
        self.add_consumer(publish, Stream::Jobs);
        // The consumers that workers are scaled by exist before the workers.
        for stream in [Stream::Tasks, Stream::Tensors] {
            let stream = self.stream(stream);
            publish.push(format!("$JS.API.CONSUMER.CREATE.{stream}.>"));
            publish.push(format!("$JS.API.CONSUMER.INFO.{stream}.*"));
        }
        let results = self.stream(Stream::Results);
        publish.push(format!("$JS.API.CONSUMER.INFO.{results}.*"));
        // For `jobs why` and dead letters.
        for stream in Stream::ALL {
            publish.push(format!("$JS.API.STREAM.MSG.GET.{}", self.stream(stream)));
        }
        publish.push(format!("{prefix}.jobs.*"));
        publish.push(format!("{prefix}.tasks.>"));
        // An image that does not fit into a task gets its failed row here.
        publish.push(format!("{prefix}.results.>"));
        self.add_end_of_job(publish);
        self.add_fault(publish, "ingest", Stream::Jobs);
        // Jobs may follow the frames of live sources, and other streams.
        publish.push("$JS.API.STREAM.NAMES".to_owned());
        for feed in self.feeds.iter().chain([&live_stream(prefix)]) {
            publish.extend([
                format!("$JS.API.STREAM.INFO.{feed}"),
                format!("$JS.API.STREAM.MSG.GET.{feed}"),
                format!("$JS.API.CONSUMER.CREATE.{feed}.>"),
                format!("$JS.API.CONSUMER.INFO.{feed}.*"),
                format!("$JS.API.CONSUMER.MSG.NEXT.{feed}.*"),
                format!("$JS.API.CONSUMER.DELETE.{feed}.*"),
            ]);
        }
    }

    /// Creates the stream of live frames.
    fn add_live_stream(&self, publish: &mut Vec<String>) {
        let stream = live_stream(self.prefix);
        publish.push(format!("$JS.API.STREAM.INFO.{stream}"));
        publish.push(format!("$JS.API.STREAM.CREATE.{stream}"));
    }

    /// Reads live frames, and publishes their results.
    fn add_live(&self, publish: &mut Vec<String>) {
        self.add_live_stream(publish);
        let stream = live_stream(self.prefix);
        publish.extend([
            format!("$JS.API.CONSUMER.CREATE.{stream}.>"),
            format!("$JS.API.CONSUMER.INFO.{stream}.*"),
            format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.*"),
            format!("{}.live.results.*", self.prefix),
        ]);
    }

    /// Creates its consumers of a stream, pulls and settles.
    fn add_consumer(&self, publish: &mut Vec<String>, stream: Stream) {
        let stream = self.stream(stream);
        publish.extend([
            format!("$JS.API.CONSUMER.CREATE.{stream}.>"),
            format!("$JS.API.CONSUMER.INFO.{stream}.*"),
            format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.*"),
            format!("$JS.ACK.{stream}.>"),
        ]);
    }

    /// Changes the records of a job, and removes what is left when it ends.
    fn add_end_of_job(&self, publish: &mut Vec<String>) {
        for stream in [Stream::Tasks, Stream::Tensors, Stream::Results] {
            publish.push(format!("$JS.API.STREAM.PURGE.{}", self.stream(stream)));
        }
        publish.push(format!("$JS.API.STREAM.PURGE.KV_{}-jobs", self.prefix));
        self.add_keys(publish, &[">"]);
    }

    /// Sets dead letters aside, and ends jobs that cannot continue.
    fn add_fault(&self, publish: &mut Vec<String>, stage: &str, stream: Stream) {
        let prefix = self.prefix;
        publish.push(format!("{prefix}.dead.{stage}.>"));
        publish.push(format!("{prefix}.dead.malformed.{stream}"));
        publish.push(format!("{prefix}.events.>"));
    }

    /// Writes to keys of the bucket.
    fn add_keys(&self, publish: &mut Vec<String>, keys: &[&str]) {
        let keys = keys
            .iter()
            .map(|key| format!("$KV.{}-jobs.{key}", self.prefix));
        publish.extend(keys);
    }

    fn stream(&self, stream: Stream) -> String {
        format!("{}_{stream}", self.prefix).to_ascii_uppercase()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rights(user: User) -> Rights {
        let names = Names {
            prefix: "trommel",
            feeds: &[],
        };
        names.rights(user, "name")
    }

    /// R37: everybody could do everything on the broker.
    #[test]
    fn no_role_can_do_the_work_of_another() {
        let may = |user, subject: &str| rights(user).publish.iter().any(|one| one == subject);
        for (user, own, others) in [
            (User::Ingest, "trommel.tasks.>", "trommel.tensors.>"),
            (User::Preprocess, "trommel.tensors.>", "trommel.tasks.>"),
            (User::Infer, "trommel.results.>", "trommel.tensors.>"),
            (
                User::Sink,
                "$JS.ACK.TROMMEL_RESULTS.>",
                "$JS.ACK.TROMMEL_TENSORS.>",
            ),
            (User::Submitter, "trommel.api.submit", "trommel.api.cancel"),
            (User::Operator, "trommel.api.*", "trommel.jobs.*"),
            (User::Serve, "trommel.infer.*", "trommel.tensors.>"),
        ] {
            assert!(may(user, own), "{user:?} lacks {own}");
            assert!(!may(user, others), "{user:?} has {others}");
        }
        for (user, _, _) in USERS {
            let subjects = rights(user).publish;
            assert!(!subjects.iter().any(|one| one == ">" || one == "$JS.API.>"));
            let deletes = |one: &String| one.starts_with("$JS.API.STREAM.DELETE");
            assert!(!subjects.iter().any(deletes), "{user:?}");
        }
    }

    #[test]
    fn one_who_holds_all_roles_has_the_rights_of_each_once() {
        let all = rights(User::Worker);
        for user in [User::Ingest, User::Preprocess, User::Infer, User::Sink] {
            for subject in rights(user).publish {
                let times = all.publish.iter().filter(|one| **one == subject).count();
                assert_eq!(times, 1, "{subject}");
            }
        }
        assert!(all.answers);
    }

    #[test]
    fn the_prefix_is_in_all_names_of_ours() {
        let text = nats_permissions("blue-1", &["EVENTS".to_owned()]);
        assert!(
            !text
                .to_ascii_lowercase()
                .replace("`trommel", "")
                .contains("trommel"),
            "{text}"
        );
        for name in [
            "\"BLUE-1\" {",
            "$BLUE_1_NATS_INGEST_PASSWORD",
            "\"$JS.API.CONSUMER.MSG.NEXT.BLUE-1_TASKS.*\"",
            "\"$KV.blue-1-jobs.worker.*\"",
            "\"blue-1.dead.infer.>\"",
            "\"$JS.API.CONSUMER.CREATE.EVENTS.>\"",
        ] {
            assert!(text.contains(name), "{name} is missing: {text}");
        }
    }

    /// The files used by compose and Kubernetes equal the command's output.
    #[test]
    fn the_shipped_configuration_is_the_printed_one() {
        let shipped = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../deploy/nats/permissions.conf"
        );
        let shipped = std::fs::read_to_string(shipped).unwrap();
        assert_eq!(
            shipped,
            nats_permissions("trommel", &[]),
            "run `trommel nats-permissions > deploy/nats/permissions.conf`"
        );
    }
}
