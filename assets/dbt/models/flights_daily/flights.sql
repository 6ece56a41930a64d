-- One row a scheduled departure. time_hour is the scheduled hour in UTC and the event time; a cancelled flight
-- has neither departure nor arrival, a diverted one no arrival delay.
select
    f.time_hour,
    c.carrier_id,
    f.flight,
    o.airport_id as origin_id,
    d.airport_id as dest_id,
    cast(f.tailnum as varchar(8)) as tailnum,
    f.sched_dep_time,
    f.dep_delay,
    f.arr_delay,
    f.air_time,
    f.distance,
    f.dep_time is null as cancelled,
    cast(f.distance * 60.0 / f.air_time as numeric(9, 3)) as speed_mph
from {{ source('source_data', 'flights') }} as f
inner join {{ source('source_data', 'carriers') }} as c on c.carrier = f.carrier
inner join {{ source('source_data', 'airports') }} as o on o.airport = f.origin
inner join {{ source('source_data', 'airports') }} as d on d.airport = f.dest
where f.time_hour >= {{ dpone_scope_start() }}
  and f.time_hour < {{ dpone_scope_end() }}
