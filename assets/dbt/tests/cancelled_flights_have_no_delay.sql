-- A flight that never left can have neither a departure delay nor a time in the air.
select time_hour, flight
from {{ ref('flights') }}
where time_hour >= {{ dpone_scope_start() }}
  and time_hour < {{ dpone_scope_end() }}
  and cancelled
  and (dep_delay is not null or air_time is not null)
