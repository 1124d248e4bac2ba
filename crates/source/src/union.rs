//! The columns of several sources together.

use trommel_types::{Column, ColumnKind, Scalar};

/// Columns in order of first appearance, each with a type that holds the values of all sources.
#[derive(Default)]
pub(super) struct Union {
    columns: Vec<Column>,
}

impl Union {
    pub(super) fn add(&mut self, columns: &[Column]) {
        for column in columns {
            match self
                .columns
                .iter_mut()
                .find(|known| known.name == column.name)
            {
                Some(known) => known.kind = wider(known.kind, column.kind),
                None => self.columns.push(column.clone()),
            }
        }
    }

    pub(super) fn into_columns(self) -> Vec<Column> {
        self.columns
    }
}

/// The type that holds the values of both: integers widen to floats, and anything else to text.
pub(super) fn wider(first: ColumnKind, second: ColumnKind) -> ColumnKind {
    use ColumnKind::{Float, Int, String};
    match (first, second) {
        (first, second) if first == second => first,
        (Int, Float) | (Float, Int) => Float,
        _ => String,
    }
}

/// Where a source's column stands among those of all, and the type it has there.
pub(super) struct Place {
    pub(super) position: usize,
    kind: ColumnKind,
}

impl Place {
    /// The places of `columns`, all of which are among `all`.
    pub(super) fn of_each(columns: &[Column], all: &[Column]) -> Vec<Self> {
        let place = |column: &Column| {
            let position = all.iter().position(|known| known.name == column.name)?;
            Some(Self {
                position,
                kind: all[position].kind,
            })
        };
        columns.iter().filter_map(place).collect()
    }

    /// A value of the source's column in the type it has here.
    pub(super) fn widened(&self, value: Scalar) -> Scalar {
        match (self.kind, value) {
            (ColumnKind::Float, Scalar::Int(value)) => Scalar::Float(value as f64),
            (ColumnKind::String, Scalar::Int(value)) => Scalar::String(value.to_string()),
            (ColumnKind::String, Scalar::Float(value)) => Scalar::String(value.to_string()),
            (ColumnKind::String, Scalar::Bool(value)) => Scalar::String(value.to_string()),
            (_, value) => value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(name: &str, kind: ColumnKind) -> Column {
        Column {
            name: name.to_owned(),
            kind,
        }
    }

    #[test]
    fn columns_stand_in_order_of_first_appearance_and_widen() {
        use ColumnKind::{Bool, Float, Int, String};
        let first = [column("a", Int), column("b", Bool), column("c", Int)];
        let second = [column("d", Float), column("c", Float), column("b", Int)];
        let mut union = Union::default();
        union.add(&first);
        union.add(&second);
        let all = union.into_columns();
        let expected = [
            column("a", Int),
            column("b", String),
            column("c", Float),
            column("d", Float),
        ];
        assert_eq!(all, expected);

        let places = Place::of_each(&second, &all);
        assert_eq!(
            places
                .iter()
                .map(|place| place.position)
                .collect::<Vec<_>>(),
            [3, 2, 1]
        );
        assert_eq!(
            places[2].widened(Scalar::Int(7)),
            Scalar::String("7".to_owned())
        );
        let places = Place::of_each(&first, &all);
        assert_eq!(
            places[1].widened(Scalar::Bool(true)),
            Scalar::String("true".to_owned())
        );
        assert_eq!(places[2].widened(Scalar::Int(7)), Scalar::Float(7.0));
        assert_eq!(places[0].widened(Scalar::Null), Scalar::Null);
    }
}
