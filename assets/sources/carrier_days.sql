-- The demo's stored procedure: what a team has that computes a mart itself and loads it by a manifest.
create schema if not exists dwh;

create table if not exists dwh.carrier_days (
    flight_day timestamp(6) not null,
    carrier_id smallint not null,
    carrier varchar(2) not null,
    flights integer not null,
    cancelled integer not null,
    mean_arr_delay numeric(9, 3),
    primary key (flight_day, carrier_id)
);

create or replace procedure dwh.refresh_carrier_days()
language sql
as $$
    delete from dwh.carrier_days;
    insert into dwh.carrier_days
    select
        date_trunc('day', f.time_hour),
        c.carrier_id,
        c.carrier,
        count(*),
        count(*) filter (where f.dep_time is null),
        cast(avg(f.arr_delay) as numeric(9, 3))
    from source_data.flights as f
    inner join source_data.carriers as c on c.carrier = f.carrier
    group by 1, 2, 3;
$$;
